"""What is compared, what every rank gets, and what is made of it: `bytesched bench`."""
