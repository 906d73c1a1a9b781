"""Which prompt comes next: shares of the sources, their epochs, and the curriculum. Pure"""
