"""The reshape of a state to fewer ranks, in memory and by a checkpoint of DCP."""
