"""Sets of runs, and what a run will cost before it is started."""

from megatron_mlmclm.study.plan import Plan, plan

__all__ = ["Plan", "plan"]
