"""The copy of the run's files in object storage (spec.checkpoint.storage), from which a new head resumes"""
