"""The schemas of most tables of tests."""

from __future__ import annotations

from tests.support.model import LONG, STRING, Field, Schema

OF_KEYS = Schema([Field("key", LONG)])
OF_NAMES = Schema([Field("key", LONG)], values=[Field("name", STRING)])
OF_K = Schema([Field("k", LONG)])
OF_K_AND_NUMBERS = Schema([Field("k", LONG)], values=[Field("v", LONG)])
OF_K_AND_TEXTS = Schema([Field("k", LONG)], values=[Field("v", STRING)])
