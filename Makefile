# Two commands for everybody: `make demo` and `make test`. Each makes .venv and installs all it needs.
# The rest is for those who change headway: `make help`.
SHELL := /bin/bash
.DELETE_ON_ERROR:
PYTHON ?= python3
VERSION ?= 1.37
BIN := .venv/bin
# A C compiler builds the fake NVML library; where there is none, PyPI's ziglang serves.
CC_FOUND := $(shell command -v cc || command -v gcc || command -v clang)

.PHONY: help demo test lint unit test-cluster kube images bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

.venv/.demo: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headway needs Python 3.11 or newer ($(PYTHON) is older); make PYTHON=python3.12 ..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { echo "no venv module: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[demo]' $(if $(CC_FOUND),,ziglang)
	@touch $@

.venv/.test: .venv/.demo
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

demo: .venv/.demo ## a small cluster on this machine: GPUs fail, see what headway publishes
	$(BIN)/headway demo $(ARGS)

test: .venv/.test lint unit ## lint, types and all tests that need neither a GPU nor Kubernetes

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: .venv/.test
	$(BIN)/pytest -m 'not cluster' $(ARGS)

kube: .venv/.test ## build or find a real Kubernetes control plane (VERSION=1.34|1.35|1.36|1.37)
	$(BIN)/python tests/cluster/build_kube.py $(VERSION)

test-cluster: kube ## all tests against that real control plane; RECORD=1 writes the README's version table
	HEADWAY_KUBE_VERSION=$(VERSION) $(BIN)/pytest -m cluster --junit-xml=build/cluster-$(VERSION).xml $(ARGS)
	$(if $(RECORD),$(BIN)/python tests/cluster/record_version.py build/cluster-$(VERSION).xml $(VERSION))

images: ## build the two images with docker, podman or buildah
	daemonset/build-images.sh

bench: .venv/.test ## fault line to tainted node, on the real control plane
	$(BIN)/python tests/bench/latency.py

clean: ## remove what was built here (not the cache of control planes)
	rm -rf build .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
