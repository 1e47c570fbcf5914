"""A complete deployment without AWS, run by `python -m tests.deploy_local` or `make deploy-local`."""
