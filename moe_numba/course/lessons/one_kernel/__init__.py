"""One kernel for a layer's experts on several GPUs: so far a model of what it would gain."""
