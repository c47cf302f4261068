"""What happened, as pictures: a canvas, and the pictures of traces."""
