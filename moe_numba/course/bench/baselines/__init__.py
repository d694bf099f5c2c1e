"""What the package's kernels are compared with: the limits of the GPU, torch and NCCL."""
