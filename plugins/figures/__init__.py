"""What a session measures about itself: waits and their causes, what crossed, iterations."""
