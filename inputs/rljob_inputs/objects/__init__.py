"""Object storage: s3://, and gs:// and az:// with fsspec's packages: listings, local copies and uploads"""
