"""Parts of a training step: backward pass, optimizer step, keyed dropout, normalization of stacked clients."""
