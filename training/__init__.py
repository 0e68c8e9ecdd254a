"""Training: config, state, step, devices, checkpoints, metrics and the loop.

Nothing here knows a task or an attention mechanism by name.
"""
