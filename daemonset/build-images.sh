#!/usr/bin/env bash
# Builds the two images with the container engine at hand: docker, podman or buildah. TAG=… names the tag.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=${TAG:-0.1.0}
for engine in docker podman buildah; do
  command -v "$engine" >/dev/null && "$engine" info >/dev/null 2>&1 && break
  engine=
done
if [ -z "${engine:-}" ]; then
  echo "no container engine answers (docker, podman or buildah): nothing built" >&2
  exit 2
fi
for half in agent aggregator; do
  "$engine" build -t "headway-$half:$tag" -f "daemonset/Dockerfile.$half" .
done
