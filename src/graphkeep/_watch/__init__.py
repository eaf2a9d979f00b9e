"""`watch`: the timeline of every graph, who holds it, and what is wrong with that."""
