"""The model gateway: programs call the policy through the APIs that they know, and exact tokens are recorded."""
