//! Tasks that score a model.
//!
//! A task is one file: it reads rows ([`data`]), makes prompts of them ([`prompt`]), and judges replies. [`runner`] asks
//! the engine, many questions at a time, and writes a line a sample ([`samples`]), from which a killed run goes on.
//! Tasks that compare how likely texts are go through [`likelihood`] instead. Code that a model wrote runs in
//! [`sandbox`] only. This crate knows the engine and prints nothing.

pub mod bfcl;
pub mod data;
pub mod fetch;
pub mod fields;
pub mod gsm8k;
pub mod hashhop;
pub mod humaneval;
pub mod ifeval;
pub mod kl;
pub mod likelihood;
pub mod mmlu;
pub mod multiple_choice;
pub mod prompt;
pub mod runner;
pub mod samples;
pub mod sandbox;
pub mod score;
pub mod subsample;
