"""Rows of our own in every foreign layout, with the columns that the public datasets have, and what they become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USER, GPT = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}
GOOD_OVER_BAD = [("Why?", "good", "bad")]
STEER = {"helpfulness": 3, "correctness": 1, "coherence": 4, "complexity": 1, "verbosity": 2}
PKU = {"prompt": "Why?", "response_0": "bad", "response_1": "good"}
TREE = {
    "message_id": "1",
    "text": "Why?",
    "role": "prompter",
    "replies": [
        {"message_id": "2", "text": "bad", "role": "assistant", "rank": 1, "replies": []},
        {
            "message_id": "3",
            "text": "good",
            "role": "assistant",
            "rank": 0,
            "replies": [{"message_id": "4", "text": "And?", "role": "prompter", "replies": []}],
        },
    ],
}


def flat(node: Mapping[str, Any], parent: str | None = None) -> list[dict[str, Any]]:
    own = {key: value for key, value in node.items() if key != "replies"}
    row = {**own, "parent_id": parent, "message_tree_id": "1"}
    return [row, *(child for reply in node["replies"] for child in flat(reply, node["message_id"]))]


VERL_ANSWERS: list[dict[str, Any]] = [
    {"style": "rule", "ground_truth": "4"},
    {"style": "rule", "ground_truth": ["4"]},
    {"style": "rule", "ground_truth": {"target": ["4"]}},
    {"style": "model", "ground_truth": "a reply that nothing is checked against"},
]
CASES: list[tuple[str, str, list[dict[str, Any]], list[Any]]] = [
    ("PKU-SafeRLHF", "pairs", [{**PKU, "better_response_id": 1, "safer_response_id": 1}], GOOD_OVER_BAD),
    (
        "HelpSteer3 (preference)",
        "pairs",
        [
            {
                "domain": "stem",
                "context": [{"role": "user", "content": "Why?"}],
                "response1": "bad",
                "response2": "good",
                "overall_preference": 2,
            }
        ],
        GOOD_OVER_BAD,
    ),
    (
        "HelpSteer2 (preference)",
        "pairs",
        [{"prompt": "Why?", "response_1": "good", "response_2": "bad", "preference_strength": -1, "split": "train"}],
        GOOD_OVER_BAD,
    ),
    (
        "HelpSteer",
        "rankings",
        [
            {"prompt": "Why?", "response": "bad", **STEER},
            {"prompt": "Alone?", "response": "x", **STEER},
            {"prompt": "Why?", "response": "good", **STEER, "helpfulness": 4},
        ],
        [("Why?", ("bad", "good"), (2, 1))],
    ),
    (
        "SHP",
        "pairs",
        [{"history": "Why?", "human_ref_A": "bad", "human_ref_B": "good", "labels": 0, "score_A": 3, "score_B": 9}],
        GOOD_OVER_BAD,
    ),
    (
        "question with response_j and response_k",
        "pairs",
        [{"qid": 1, "question": "Why?", "response_j": "good", "response_k": "bad"}],
        GOOD_OVER_BAD,
    ),
    (
        "arena conversations",
        "pairs",
        [
            {
                "model_a": "x",
                "model_b": "y",
                "winner": winner,
                "conversation_a": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "bad"}],
                "conversation_b": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "good"}],
            }
            for winner in ("model_b", "tie", "tie (bothbad)")
        ],
        GOOD_OVER_BAD,
    ),
    (
        "arena answers",
        "pairs",
        [
            {
                "prompt": '["Why?"]',
                "response_a": '["good"]',
                "response_b": '["bad"]',
                "winner_model_a": 1,
                "winner_model_b": 0,
                "winner_tie": 0,
            }
        ],
        GOOD_OVER_BAD,
    ),
    (
        "AlpacaFarm",
        "pairs",
        [
            {
                "instruction": "Why?",
                "input": "",
                "output_1": "bad",
                "output_2": "good",
                "preference": 2,
                "raw_preference": 4,
            }
        ],
        GOOD_OVER_BAD,
    ),
    (
        "summarize_from_feedback (comparisons)",
        "pairs",
        [
            {
                "info": {"id": "1", "title": "Anchors", "post": None, "subreddit": None, "site": None, "article": None}
                | info,
                "summaries": [
                    {"text": " bad", "policy": "a", "note": ""},
                    {"text": " good", "policy": "b", "note": ""},
                ],
                "choice": 1,
                "worker": "w",
                "batch": "batch3",
                "split": "train",
                "extra": {"confidence": 8},
            }
            for info in ({"subreddit": "kedges", "post": "A long post."}, {"site": "own", "article": "News."})
        ],
        [
            ("SUBREDDIT: r/kedges\n\nTITLE: Anchors\n\nPOST: A long post.\n\nTL;DR:", "good", "bad"),
            ("TITLE: Anchors\n\nNews.\n\nTL;DR:", "good", "bad"),
        ],
    ),
    (
        "WebGPT comparisons",
        "pairs",
        [
            {
                "question": {"dataset": "own", "id": "1", "full_text": "Why?"},
                "quotes_0": {"title": ["x"], "extract": ["y"]},
                "tokens_0": {"prefix": [1], "completion": [2]},
                "quotes_1": {"title": ["x"], "extract": ["y"]},
                "tokens_1": {"prefix": [1], "completion": [2]},
                "answer_0": "bad",
                "answer_1": "good",
                "score_0": -0.5,
                "score_1": 0.5,
            },
            {"question": {"full_text": "Tie?"}, "answer_0": "x", "answer_1": "y", "score_0": 0, "score_1": 0},
        ],
        GOOD_OVER_BAD,
    ),
    (
        "OpenAI preference",
        "pairs",
        [
            {
                "input": {"messages": [{"role": "user", "content": "Why?"}], "tools": [], "parallel_tool_calls": True},
                "preferred_output": [{"role": "assistant", "content": "good"}],
                "non_preferred_output": [{"role": "assistant", "content": "bad"}],
            }
        ],
        GOOD_OVER_BAD,
    ),
    (
        "LLaMA-Factory ShareGPT pairs",
        "pairs",
        [
            {
                "conversations": [USER],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            }
        ],
        GOOD_OVER_BAD,
    ),
    (
        "ms-swift pairs",
        "pairs",
        [
            {
                "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "good"}],
                "rejected_response": "bad",
            }
        ],
        GOOD_OVER_BAD,
    ),
    (
        "Alpaca pairs (output: [better, worse])",
        "pairs",
        [{"instruction": "Why?", "input": "", "output": ["good", "bad"]}],
        GOOD_OVER_BAD,
    ),
    (
        "TRL pairs with the prompt in both texts",
        "pairs",
        [{"chosen": "The sea is blue.", "rejected": "The sea is beige."}],
        [("The sea is", "blue.", "beige.")],
    ),
    (
        "UltraFeedback",
        "rankings",
        [
            {
                "source": "own",
                "instruction": "Why?",
                "models": ["a", "b"],
                "completions": [
                    {"model": "a", "response": "bad", "overall_score": 9, "fine-grained_score": 2.5},
                    {"model": "b", "response": "good", "overall_score": 7, "fine-grained_score": 4.0},
                ],
            }
        ],
        [("Why?", ("bad", "good"), (2, 1))],
    ),
    (
        "Nectar",
        "rankings",
        [
            {
                "prompt": "\n\nHuman: Why?\n\nAssistant: ",
                "answers": [
                    {"answer": "good", "model": "a", "rank": 1.0},
                    {"answer": "bad", "model": "b", "rank": 2.0},
                ],
                "turns": 1,
                "num_responses": 2,
                "source": ["own"],
                "good_natured": True,
            }
        ],
        [("Why?", ("good", "bad"), (1, 2))],
    ),
    (
        "BeaverTails",
        "thumbs",
        [
            {"prompt": "Why?", "response": "bad", "category": {"harm": True}, "is_safe": False},
            {"prompt": "Why?", "response": "good", "category": {"harm": False}, "is_safe": True},
        ],
        [("Why?", "bad", False), ("Why?", "good", True)],
    ),
    (
        "stepwise supervision",
        "thumbs",
        [
            {"prompt": "Why?", "completions": ["one", "two"], "labels": [True, True]},
            {"prompt": "Why?", "completions": ["one", "oops"], "labels": [True, False]},
        ],
        [("Why?", "one\ntwo", True), ("Why?", "one\noops", False)],
    ),
    (
        "OASST trees",
        "rankings",
        [{"message_tree_id": "1", "tree_state": "ready_for_export", "prompt": TREE}],
        [("Why?", ("bad", "good"), (2, 1))],
    ),
    ("OASST messages", "rankings", flat(TREE), [("Why?", ("bad", "good"), (2, 1))]),
    (
        "verl",
        "prompts",
        [
            {
                "data_source": "own",
                "prompt": [{"role": "user", "content": "2 + 2?"}],
                "ability": "math",
                "reward_model": reward_model,
                "extra_info": {"split": "train", "index": 0},
            }
            for reward_model in VERL_ANSWERS
        ],
        [("2 + 2?", "4"), ("2 + 2?", "4"), ("2 + 2?", "4"), ("2 + 2?", None)],
    ),
]
