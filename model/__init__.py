"""One forward: loading and its gate, the packed batch, executors, attention and kernels."""
