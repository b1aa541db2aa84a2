// A container runtime that runs nothing, for the real kubelet in the cluster tests: Kubernetes' own fake of the CRI,
// served on the unix socket named by the first argument until the process is ended.
package main

import (
	"fmt"
	"os"

	"k8s.io/cri-client/pkg/fake"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: fakecri unix:///path/to/socket")
		os.Exit(2)
	}
	runtime := fake.NewFakeRemoteRuntime()
	runtime.ImageService.SetFakeImageSize(1) // the kubelet refuses an image whose size is not set
	if err := runtime.Start(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	select {}
}
