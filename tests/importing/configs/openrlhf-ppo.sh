set -x
MODEL=HuggingFaceTB/SmolLM2-360M-Instruct
# Two machines' worth of roles on one.
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{"working_dir": "/srv", "env_vars": {"WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567"}}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --ref_num_gpus_per_node 2 \
   --actor_num_nodes 1 --actor_num_gpus_per_node 2 \
   --vllm_num_engines 0 \
   --colocate_all_models \
   --pretrain ${MODEL} \
   --reward_pretrain ours/reward-360m \
   --save_path ./ckpt/smol-ppo \
   --prompt_data data/questions.jsonl \
   --input_key question \
   --label_key answer \
   --apply_chat_template \
   --rollout_batch_size 6 --micro_rollout_batch_size 2 \
   --train_batch_size 3 --micro_train_batch_size 1 \
   --n_samples_per_prompt 1 \
   --max_epochs 1 --num_episodes 1 \
   --prompt_max_len 64 --generate_max_len=12 \
   --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 \
   --init_kl_coef 0.02 --kl_estimator k1 \
   --eps_clip_low_high 0.2 0.28 \
   --normalize_reward \
   --reward_clip_range -5 5 \
   --zero_stage 3 --bf16 --gradient_checkpointing \
   --use_wandb 0123456789abcdef0123456789abcdef01234567
