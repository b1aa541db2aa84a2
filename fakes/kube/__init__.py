"""An embedded Kubernetes API: the demo's cluster, and the tests' one where no control plane is built.

    async with EmbeddedKube(folder) as kube:
        ...  # kube.url, kube.ca_file, kube.kubeconfig, kube.admin_token

or, as a process: `python -m fakes.kube --dir DIR`. One server on loopback HTTPS, one process, nothing on disk but
certificates, kubeconfig and audit log. `tests/contract/test_kube_contract.py` holds it to what a real API server
answers; what that file does not ask, this package need not do.

status     errors as the API server words them      resources   what is served, and discovery
schema     known fields and their types             validate    what is refused, what is filled in
selectors  label and field selectors                patch       the three patch formats
store      objects, versions, history               api         verbs on the store
tokens     ServiceAccount tokens and reviews        tables      what `kubectl get` prints
server     HTTP, authentication, watches            audit       the audit log
cluster    scheduler, kubelet, garbage collection   embedded    the server with its files
protobuf   bodies that kubectl sends so             targets     what path and method name
"""

from fakes.kube.embedded import EmbeddedKube
from fakes.kube.faults import Faults

__all__ = ["EmbeddedKube", "Faults"]
