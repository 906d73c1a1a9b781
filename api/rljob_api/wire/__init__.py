"""The wire contract between the Pods of a job: environment, URL paths, and messages."""
