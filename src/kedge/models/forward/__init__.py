"""Forward passes: packed rows, attention, log-probs and values from hidden states, adapters."""
