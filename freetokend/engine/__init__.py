"""One engine step: inputs, the model's forward pass, sampling. `work` is torch-free."""
