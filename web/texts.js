// What the panel and the toast say, in ComfyUI's language.

const TEXTS = {
  en: {
    empty: 'No run yet. Put the node FLUX Fast Path between the model loader and the sampler, then run the workflow.',
    unavailable: 'The server did not answer. Pictures are unaffected; restart ComfyUI to see reports here.',
    refresh: 'Refresh',
    run: 'Run',
    fused: 'fused',
    aside: 'stepped aside',
    running: 'running',
    interrupted: 'interrupted',
    error: 'error',
    unaffected: 'The image is unaffected: ComfyUI drew it in its usual way, at its usual speed.',
    identical: 'Bit-identical to ComfyUI without this pack.',
    close: 'Tier high: very close to the lossless image, not bit-identical.',
    model: 'Model',
    gpu: 'GPU',
    tier: 'Quality tier',
    blocks: 'Blocks',
    steps: 'Steps',
    perStep: 'Time per step',
    saved: 'Saved per step',
    notTimed: 'not timed',
    savedBars: 'Milliseconds saved per step, by kind',
    kind: 'places',
    high: 'Tier high',
    highMounted: 'in {sites} of {of} places',
    highAside: 'stepped aside, so this run was lossless',
    relativeError: 'largest relative error',
    disabled: 'Switched off on this GPU',
    notes: 'Left to ComfyUI',
    state_proven: 'proven',
    state_partly: 'partly',
    state_disabled: 'off',
    state_idle: 'idle',
    toastTitle: 'FLUX Fast Path switched one part off',
    toastDetail: '{op}: {reason}. The image is unaffected; this part runs at normal speed.',
    ops: {}
  },
  zh: {
    empty: '还没有运行记录。请将“FLUX 快速通道”节点放在模型加载器和采样器之间，然后运行工作流。',
    unavailable: '服务器没有响应。图像不受影响；重启 ComfyUI 后即可在此查看报告。',
    refresh: '刷新',
    run: '运行',
    fused: '已融合',
    aside: '未启用',
    running: '运行中',
    interrupted: '已中断',
    error: '出错',
    unaffected: '图像不受影响：ComfyUI 以平常的方式和速度完成了绘制。',
    identical: '与未安装本扩展时逐位相同。',
    close: '高速档：与无损图像非常接近，但并非逐位相同。',
    model: '模型',
    gpu: '显卡',
    tier: '质量档',
    blocks: '模块数',
    steps: '步数',
    perStep: '每步用时',
    saved: '每步节省',
    notTimed: '未计时',
    savedBars: '各类运算每步节省的毫秒数',
    kind: '处',
    high: '高速档',
    highMounted: '用于 {of} 处中的 {sites} 处',
    highAside: '未启用，因此本次运行为无损',
    relativeError: '最大相对误差',
    disabled: '在此显卡上已关闭',
    notes: '交由 ComfyUI 处理',
    state_proven: '已验证',
    state_partly: '部分',
    state_disabled: '关闭',
    state_idle: '未用到',
    toastTitle: 'FLUX 快速通道关闭了一个部分',
    toastDetail: '{op}：{reason}。图像不受影响，该部分以正常速度运行。',
    ops: {
      residual_gate: '残差门控',
      layer_norm_modulate: 'LayerNorm 与调制',
      qk_norm_rope: 'Q/K 归一化与 RoPE',
      gelu_concat: 'GELU 与拼接',
      head_concat: 'V 拼接',
      linear: '更快的 GEMM',
      linear_gelu: 'GEMM 内的 GELU',
      column_copy: '注意力结果拷贝'
    }
  }
}

export function textsFor(locale) {
  const language = typeof locale === 'string' && locale.toLowerCase().startsWith('zh') ? 'zh' : 'en'
  const table = TEXTS[language]
  const say = (key, values = {}) =>
    String(table[key] ?? TEXTS.en[key] ?? key).replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole))
  return { say, op: (op) => table.ops[op.op] ?? op.label ?? op.op }
}
