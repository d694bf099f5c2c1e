"""A key/value cache of transformers with the same context in each step, for timing a step of decoding repeatedly."""

import torch
from transformers.cache_utils import Cache, StaticLayer


class ContextLayer(StaticLayer):
    """Keys and values of one layer for ``length`` earlier tokens, and in the last place those of the current token.

    The current token's are overwritten by the next step, so that a CUDA graph of a step can be replayed any number of
    times. Those of earlier tokens are random until they are assigned.
    """

    def __init__(self, length: int, window: int | None = None):
        super().__init__(max_cache_len=min(length + 1, window or length + 1))
        self.length, self.is_sliding = length, window is not None

    def lazy_initialization(self, key_states, value_states):
        """Allocate the cache for the shapes of the current token's keys and values."""
        super().lazy_initialization(key_states, value_states)
        random = torch.Generator(self.device).manual_seed(0)
        for states in (self.keys, self.values):
            states.normal_(generator=random)

    def update(self, key_states, value_states, *_, **__):
        """Store the current token's keys and values; return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[:, :, -1:] = key_states
        self.values[:, :, -1:] = value_states
        return self.keys, self.values

    def get_seq_length(self):
        """Return the number of earlier tokens."""
        return self.length

    def get_query_offset(self):
        """Return the position of the current token."""
        return self.length

    def get_mask_sizes(self, query_length):
        """Return the number of keys, and the position of the first."""
        return self.max_cache_len, self.length + 1 - self.max_cache_len


def context_cache(config, length: int) -> Cache:
    """Return a cache for a model's layers with ``length`` earlier tokens of each sequence."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    return Cache(layers=[ContextLayer(length, window) for window in windows])
