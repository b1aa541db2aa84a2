"""What each part of the control plane is started with."""

from __future__ import annotations

import json
from pathlib import Path

ISSUER = "https://kubernetes.default.svc"

# Names below the control plane's folder.
KEY_FILE = "sa.key"  # one RSA key signs and verifies ServiceAccount tokens
TOKEN_FILE = "tokens.csv"
CA_FILE = "certs/apiserver.crt"  # self-signed by the API server at its first start
AUDIT_POLICY_FILE = "audit-policy.yaml"
AUDIT_LOG_FILE = "audit.log"


def etcd(folder: Path, client_url: str, peer_url: str) -> list[str]:
    """Flags of etcd. Without fsync: the data need not outlive the machine."""
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client_url}",
        f"--advertise-client-urls={client_url}",
        f"--listen-peer-urls={peer_url}",
        "--unsafe-no-fsync",
        "--log-level=error",
    ]


def apiserver(folder: Path, etcd_url: str, port: int) -> list[str]:
    """Flags of kube-apiserver: static tokens, Node authorizer and RBAC, audit log."""
    return [
        f"--etcd-servers={etcd_url}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={(folder / CA_FILE).parent}",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-key-file={folder / KEY_FILE}",
        f"--service-account-signing-key-file={folder / KEY_FILE}",
        f"--token-auth-file={folder / TOKEN_FILE}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--service-cluster-ip-range=10.96.0.0/16",
        f"--audit-policy-file={folder / AUDIT_POLICY_FILE}",
        f"--audit-log-path={folder / AUDIT_LOG_FILE}",
        "--audit-log-format=json",
        "--audit-log-mode=blocking",  # a line is in the file before its request ends
        "--audit-log-maxsize=100000",  # MB; 0 would mean a new file after 100
    ]


def scheduler(folder: Path, kubeconfig: Path) -> list[str]:
    """Flags of kube-scheduler, and its configuration file."""
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        # the default limit of 50 requests a second would hide every other effect on the scheduling rate
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 5000, "burst": 5000},
        "leaderElection": {"leaderElect": False},
    }
    path = folder / "scheduler.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return [f"--config={path}", "--secure-port=0"]


def controller_manager(folder: Path, kubeconfig: Path, node_monitor_grace: str) -> list[str]:
    """Flags of kube-controller-manager. `node_monitor_grace` is a Go duration: after it a silent node is Unknown."""
    return [
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={folder / KEY_FILE}",
        f"--root-ca-file={folder / CA_FILE}",
        f"--node-monitor-grace-period={node_monitor_grace}",
        # with the default limits the default ServiceAccount, which every pod needs, comes after eight seconds
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
    ]
