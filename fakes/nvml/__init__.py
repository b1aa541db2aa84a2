"""A `libnvidia-ml.so.1` for machines without a GPU: C sources, compiled against NVIDIA's own nvml.h by `build`."""
