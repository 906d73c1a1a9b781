"""This machine: folders, commands, Debian packages, cgroups, and the Go programs of Kubernetes."""
