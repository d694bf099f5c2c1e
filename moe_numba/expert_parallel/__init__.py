"""Expert parallelism inside a host: tokens travel to the GPUs that hold their experts, and back."""
