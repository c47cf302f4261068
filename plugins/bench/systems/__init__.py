"""What is compared, each set up on a plain model, in processes of its own where it must be."""
