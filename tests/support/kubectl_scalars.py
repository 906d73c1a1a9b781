"""Plain YAML scalars and the values that kubectl 1.35 gives them.

From `kubectl patch --local -f FILE -p '{}' -o json`; a test against a real kubectl keeps them true.
"""

from typing import Any

AS_KUBECTL_READS: dict[str, Any] = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "on", "On", "ON", "true", "True", "TRUE"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "off", "Off", "OFF", "false", "False", "FALSE"), False),
    **dict.fromkeys(("~", "null", "Null", "NULL", ""), None),
    **{text: text for text in ("tRue", "yEs", "nULL", "_1", "12:30", "12:30:00", "1:2.5", "1.5.2", "inf", "nan", "=")},
    **{text: text for text in ("0x", "0o", "1e", "e3", "0b2", "0xG", "1,000", ".", "+", "..", "v1.2", "hf://a/b")},
    **{text: text for text in ("2026-01-01", "2026-01-01T00:00:00Z")},
    **{"0": 0, "00": 0, "-0": 0, "0.": 0, "1": 1, "+1": 1, "-1": -1, "07": 7, "0777": 511, "0o17": 15, "0_7": 7},
    **{"08": 8, "09": 9, "0x1F": 31, "-0x1F": -31, "0b11": 3, "0b-1": -1, "1_000": 1000, "1__0": 10},
    **{"1e3": 1000, "1E3": 1000, "1e+3": 1000, "1.5e3": 1500, "1_e3": 1000, "5.": 5, "3.0": 3},
    **{"1e-3": 0.001, ".5": 0.5, "+.5": 0.5, "-.5": -0.5, "1_0.5": 10.5, "08.5": 8.5, "00.5": 0.5, "1e-6": 1e-6},
    "123456789012345678901234567890": 1.2345678901234568e29,
}
