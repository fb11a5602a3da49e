from tests.aot.triton_cases import *
import sys,time
OPT=dict(head_windows=True, head_wise=True, soft_cap=50.0)
new={}
for d in (64,128,256):
    for cache in ("bf16","fp8-16","int8-channel"):
        for group,q,tree in ((1,4,True),(8,4,True),(16,4,True),(24,1,False),(40,1,False)):
            opt=dict(queries=q,tree=True,**OPT) if tree else {}
            new[f"paged-decode-{cache}-d{d}-g{group}{'-tree' if tree else ''}"]=paged_decode(cache,d,group,**opt)
for L,R in ((256,64),(128,64),(64,32)):
    for cache in ("bf16","fp8"):
        if cache=="fp8" and L%128: continue
        for heads,q,tree in ((3,1,False),(24,1,False),(64,1,False),(3,4,True),(8,4,True)):
            new[f"mla-decode-{cache}-{L}-{R}-h{heads}{'-tree' if tree else ''}"]=mla_decode(cache,heads,L,R,queries=q,tree=tree)
        for heads in (3,24,64):
            new[f"mla-sparse-{cache}-{L}-{R}-h{heads}"]=mla_sparse(cache,heads,L,R)
new["mla-sparse-bf16-512-128-h16"]=mla_sparse("bf16",16,512,128)
for dim in (64,128,256):
    for cache in ("bf16","fp8"):
        for heads in (8,32,64,128):
            for n in (16,32,64,128,256):
                new[f"index-scores-{cache}-d{dim}-h{heads}-{n}"]=indexed(pallas_attn.index_scores,cache,heads,dim,num_tokens=n)
new={k:v for k,v in new.items() if k not in TRITON_CASES}
if __name__=="__main__":
    from tests.aot.triton_compile import compile_call, complaints
    pre=tuple(sys.argv[1].split(","))
    t=time.time()
    for n,c in new.items():
        if not n.startswith(pre): continue
        for card in CARDS:
            try:
                ks=compile_call(c,CARDS[card]); bad=list(complaints(ks,c,card))
                print(n,card,bad or "ok",flush=True)
            except Exception as e: print(n,card,"ERR",type(e).__name__,str(e)[:200],flush=True)
    print("DONE",len(new),time.time()-t)
