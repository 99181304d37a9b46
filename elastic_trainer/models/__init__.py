"""Models as ordered lists of named layers: the shipped ones, and the door for a user's own."""
