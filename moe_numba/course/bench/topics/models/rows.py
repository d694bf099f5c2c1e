"""The names of the rows of the topic `models`."""

DEFAULT = "grouped_mm"  # what transformers runs if the caller selects nothing
OURS, WITH_ROUTERS = "final", "final, fused routers"
PACKED = "final, MXFP4"  # and fused routers; of gpt-oss
