"""What tests of several folders share: real servers, harnesses and fake endpoints."""
