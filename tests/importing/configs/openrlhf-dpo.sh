#!/bin/bash
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --save_path ./ckpt/dpo \
   --save_steps -1 \
   --logging_steps 1 \
   --eval_steps -1 \
   --train_batch_size 4 \
   --micro_train_batch_size 1 \
   --pretrain Qwen/Qwen2.5-0.5B-Instruct \
   --bf16 \
   --max_epochs 1 \
   --max_len 256 \
   --zero_stage 2 \
   --learning_rate 5e-7 \
   --beta 0.2 \
   --label_smoothing 0.1 \
   --dataset data/choices.jsonl \
   --chosen_key chosen \
   --rejected_key rejected \
   --lora_rank 4 \
   --lora_alpha 8 \
   --flash_attn
EOF
deepspeed --module $training_commands
