"""Floating-point operations of a JAX function: `flops.count`, `flops.account`."""

from flops.counting import Account, account, count

__all__ = ["Account", "account", "count"]
