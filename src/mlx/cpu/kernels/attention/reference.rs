//! Attention written plainly, in float64: what the fast kernels are tested against.

use super::{Attention, Mask, Stored};

/// Softmax of the visible scores (and the sink) times the values, `[batch, heads, length, value_dim]`.
pub fn attention(a: &Attention<'_>) -> Vec<f64> {
    let [batch, heads, length, dim] = a.queries.shape();
    let [_, kv_heads, keys, _] = a.keys.shape();
    let value_dim = a.values.shape()[3];
    let group = heads / kv_heads.max(1);
    let mut result = Vec::with_capacity(batch * heads * length * value_dim);
    for b in 0..batch {
        for h in 0..heads {
            let sink = a.sinks.and_then(|sinks| sinks.get(h)).map(f64::from);
            for l in 0..length {
                let query: Vec<f64> = (0..dim).map(|d| dense(a, b, h, l, d)).collect();
                let scores: Vec<f64> = (0..keys)
                    .map(|t| {
                        let key = stored(&a.keys, b, h / group, t);
                        let dot: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                        dot * f64::from(a.scale) + bias(a, [b, h, l, t])
                    })
                    .collect();
                let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let mut row = vec![0.0; value_dim];
                if largest > f64::NEG_INFINITY {
                    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                    let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp());
                    for (t, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
                        for (sum, value) in row.iter_mut().zip(stored(&a.values, b, h / group, t)) {
                            *sum += weight / total * value;
                        }
                    }
                }
                result.extend(row);
            }
        }
    }
    result
}

fn dense(a: &Attention<'_>, b: usize, h: usize, l: usize, d: usize) -> f64 {
    a.queries.data.get(a.queries.start(b, h, l) + d).map_or(f64::NAN, f64::from)
}

fn stored(heads: &Stored<'_>, b: usize, h: usize, t: usize) -> Vec<f64> {
    let dim = heads.shape()[3];
    match heads {
        Stored::Dense(heads) => {
            let start = heads.start(b, h, t);
            (start..start + dim).map(|i| heads.data.get(i).map_or(f64::NAN, f64::from)).collect()
        }
        Stored::Quantized(q) => {
            let at = |strides: [usize; 3]| b * strides[0] + h * strides[1] + t * strides[2];
            let (words, groups) = (at(q.code_strides), at(q.group_strides));
            let code = |d: usize| {
                (0..q.bits).fold(0u32, |code, i| {
                    let bit = d * q.bits + i;
                    code | (q.codes[words + bit / 32] >> (bit % 32) & 1) << i
                })
            };
            let entry =
                |of: &super::Floats<'_>, d: usize| of.get(groups + d / q.group).map_or(f64::NAN, f64::from);
            (0..dim).map(|d| f64::from(code(d)) * entry(&q.scales, d) + entry(&q.biases, d)).collect()
        }
    }
}

fn bias(a: &Attention<'_>, [b, h, l, t]: [usize; 4]) -> f64 {
    let visible = a.visible(l);
    if !visible.contains(&t) {
        return f64::NEG_INFINITY;
    }
    let at = |strides: [usize; 4]| b * strides[0] + h * strides[1] + l * strides[2] + t * strides[3];
    match a.mask {
        None => 0.0,
        Some(Mask::Bool { allowed, strides }) if allowed[at(strides)] != 0 => 0.0,
        Some(Mask::Bool { .. }) => f64::NEG_INFINITY,
        Some(Mask::Additive { bias, strides }) => bias.get(at(strides)).map_or(f64::NAN, f64::from),
    }
}
