"""Which prompt comes next: shares of the sources, epochs of each, and the curriculum. Pure"""
