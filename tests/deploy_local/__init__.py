"""A real deploy without AWS: `python -m tests.deploy_local`, or `make deploy-local`."""
