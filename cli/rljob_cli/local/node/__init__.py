"""One local node: runs the containers of Pods as processes on this machine."""
