"""A whole job as a model: the real machines, and around them a world that can go wrong.

NodeMachine, ShardSlots, SnapshotCycle, decide, the lineage, plan.py and the choice of a
drained checkpoint are the real ones.  Modelled are what carries out their decisions (the
SMP's servers, the supervisor, MPI, the disk) and everything that can happen between two
steps.  ``enabled`` lists the steps that are possible, ``World.perform`` takes one.  Nothing
is random here: a run is its list of steps.  walks.py takes random ones, explore.py all.
"""
