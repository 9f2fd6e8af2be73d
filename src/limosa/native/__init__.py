"""What is in C: CRIU's plugin and the software GPU, and what compiles them."""
