"""How bytes move between ranks: process groups of our own, and sums in two levels over them."""
