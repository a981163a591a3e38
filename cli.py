"""The front door of a checkout: `python cli.py kernels` is `mla-verify kernels`."""

from mla_verify.cli import main

if __name__ == "__main__":
    main()
