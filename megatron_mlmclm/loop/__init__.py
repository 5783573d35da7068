"""What Megatron's loop is given: run folder, datasets, forward step, validation and progress."""
