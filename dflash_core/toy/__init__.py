"""A tiny real target: a small language model trained here, in seconds, on text that we generate.

The demo and the tests need a model whose answers a drafter can learn and that can be fine-tuned to
another style under the drafter's feet. `texts` is what it learns, `build.build_toy_target` makes it.
"""
