"""One kernel for a layer on several GPUs: a model of its gain, the launches that it replaces, and the kernel."""
