"""Services of a job, whatever they host: their replicas, requests and demand."""
