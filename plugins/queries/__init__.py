"""What a script asks of gradients while they are on their way: norms, and changes noted down."""
