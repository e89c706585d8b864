"""An entry for a public registry of differential privacy deployments.

The fields are those that OpenDP's registry asks for in its three tiers: the deployment, its guarantee, its details.
What only people know (who curates the data, what it is for) is left null, to be filled in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from terrine.verify.claims import claimed
from terrine.verify.manifest import MANIFEST, RESULTS, digest, read_json


def entry(folder: Path) -> dict[str, Any]:
    """The registry entry of a release, from what is handed on."""
    (privacy, _), results = claimed(folder), read_json(folder / RESULTS)
    described = f"a {results['model']} model of {results['classes']} classes, trained by {privacy['method']}"
    person = privacy["unit"] == "person"
    return {
        "deployment": {
            "name": None,
            "data_curator": None,
            "intended_use": None,
            "description": described,
            "product_type": "machine learning model",
            "publication_date": privacy["made"],
        },
        "guarantee": {
            "flavor": "approximate differential privacy" if privacy["delta"] else "pure differential privacy",
            "epsilon": privacy["epsilon"],
            "delta": privacy["delta"],
            "privacy_unit": privacy["unit"],
            "privacy_unit_description": "a person with all rows under its id" if person else "one row of the data",
            "neighbouring_relation": privacy["neighbours"],
            "deployment_model": "central",
        },
        "details": {
            "data_domain": None,
            "unprotected_quantities": privacy["public_facts"],
            "mechanism": privacy["method"],
            "accounting": "privacy loss distributions, by two accountants; all parts of the run composed",
            "composition": privacy["ledger"],
            "post_processing": "the model is evaluated and served without further looks at the private rows",
            "hyperparameter_tuning": privacy.get("tuning"),
            "randomness": privacy["generator"],
            "implementation": f"Terrine {privacy['versions']['terrine']}",
            "implementation_rationale": None,
            "events": privacy["events"],
            "manifest_sha256": digest(folder / MANIFEST),
        },
    }
