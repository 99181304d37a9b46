"""Channels that carry tensors between workers: ZeroMQ, torch.distributed, in-process."""
