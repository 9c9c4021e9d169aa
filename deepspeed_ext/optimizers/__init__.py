"""DeepSpeed's optimizers behind one small interface: masters, weights, scalars.

One module a family.
"""

from deepspeed_ext.optimizers.choice import view_of
from deepspeed_ext.optimizers.view import Master, OptimizerView, Weight

__all__ = ["Master", "OptimizerView", "Weight", "view_of"]
